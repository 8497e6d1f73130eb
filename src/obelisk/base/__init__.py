"""Foundations every other package may use: errors, settings, digests, logging and progress.

`base` imports nothing else of Obelisk. It promises stable error classes (scripts match on them),
digests that are the same in every process, and that `settings` is the only reader of the
environment.
"""

"""The top level: chains the stages, picks devices, touches the cache, and talks to people.

Takes programs (by name, from a file, or as graphs) and gives compiled ones, verdicts, reports and
tables. Only this package may see every other one; nothing below it sees `app`.
"""

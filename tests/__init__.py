"""Tests of Obelisk."""

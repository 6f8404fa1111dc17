"""Histories of what clients did and read, and their checkers."""

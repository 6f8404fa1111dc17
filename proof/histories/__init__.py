"""Histories of what clients did and saw, and their checkers."""

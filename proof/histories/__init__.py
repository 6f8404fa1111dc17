"""Histories of the actions and reads of clients, and their checkers."""

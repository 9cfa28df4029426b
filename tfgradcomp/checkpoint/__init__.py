"""Folders of backups, and their conversion to another number of workers."""

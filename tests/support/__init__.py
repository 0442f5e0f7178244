"""Modules and data that several test files share."""

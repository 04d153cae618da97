"""Programs, one file or folder each. Nothing outside imports them but the table in __main__.py."""

"""Plans and runs as people read them: tables, curves, pages, reasons in words."""

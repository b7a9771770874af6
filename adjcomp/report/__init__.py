"""How plans are shown: text, pages, traces."""

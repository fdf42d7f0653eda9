"""One self-contained HTML page from what the other commands wrote: no network, no script, no font from elsewhere.

``inputs`` recognises and reads files, ``fx`` parses a graph's text, ``layers`` cuts one layer out and marks what the
passes changed, ``layout`` places it, ``svg`` draws, ``sections`` turns records into what the template shows, ``render``
fills the template.
"""

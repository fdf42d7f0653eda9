"""One self-contained HTML page from what the other commands wrote: no network, no script, no font from elsewhere.

``inputs`` recognises and reads files, ``shapes`` checks what they hold, ``sections``, ``measured`` and ``graphs`` turn
it into what the templates show, ``charts`` places what is drawn, ``render`` fills the templates.
"""

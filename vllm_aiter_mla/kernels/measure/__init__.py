"""Back ends timed on the card they run on: how long each takes by token count, and which of them is chosen from it.

``clock`` measures, ``operands`` keeps the weights cold, ``sweep`` times one layer shape, ``table`` chooses (pure),
``store`` keeps figures between starts. ``bench`` uses the same clock.
"""

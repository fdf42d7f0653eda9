"""Python imports this at its start in each process of a rehearsal: it puts the rehearsal card in."""

from tests.sandbox.rehearsal_card import install_from_environment

install_from_environment()

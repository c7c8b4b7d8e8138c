"""Chaos: a fleet of real workers, a hand that breaks everything around them, and a judge that reads what came of it.

``environment`` makes the servers, ``fleet`` the workers, ``agents`` and ``agent.sh`` do the work and write the ``ledger``,
``hand`` breaks and operates, ``judge`` compares the ledger with the rows. ``scripts/chaos`` is the door.
"""

"""How fast the product is beside plain limits of the same machine: ``scripts/bench``.

Reading order: ``__main__`` (the command and its JSON), ``rows``, ``scale`` and ``guarantees`` (what is measured, and what
is asked of it), ``figures`` (a measured number), ``ground`` (the server, the databases, the processes), ``worker`` (a worker in a
process of its own), ``limits`` (what the same work costs without the product).
"""

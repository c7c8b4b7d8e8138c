"""What a task is, and what may become of it: values, entities and rules, without I/O.

Reading order: ``words`` (statuses and the table of moves), ``outcome`` (the values that pass between the three units),
``settle`` (the one place that decides), ``entities`` (the same as rows). Only ``entities`` imports SQLAlchemy.
"""

"""Screens: values in, lines out.

Reading order: ``text`` and ``short`` (how data and numbers are written), ``frame`` (lines and columns), then the pure
renderers ``run_view``, ``plain``, ``summary``, ``board`` and ``show``; last ``terminal``, ``keys`` and ``live``, which
know a real terminal. Nothing here reads the database: snapshots come from callables that the command line hands in.
"""

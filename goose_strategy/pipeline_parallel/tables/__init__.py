"""Schedules with any number of stages per rank, as tables that are made, checked and timed."""

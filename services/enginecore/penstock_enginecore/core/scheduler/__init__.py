"""Scheduler: chooses the requests and tokens of each step, and turns step results into outputs. To understand the
package, read ``scheduler.py`` first.
"""

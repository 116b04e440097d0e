"""Plugs for training frameworks: `from jaxfp8.plugs import maxtext`. One file for each framework.

`import jaxfp8` does not import this folder. A plug imports its framework when it is called.
"""

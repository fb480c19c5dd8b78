"""States of recurrent layers, for models in which all or some layers have a recurrent state instead of keys and
values.
"""

"""A model of a server under load, to judge policies without a GPU."""

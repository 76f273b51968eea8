"""``python -m sglang_dynspec doctor``: will dynspec be in force on a server started from here?

Every check looks at the real thing: interpreters are started, a policy is made in a spawned
process, SGLang is imported there. Nothing of a server is started.
"""

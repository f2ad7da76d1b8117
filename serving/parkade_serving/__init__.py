"""The pod: vLLM's plug-ins, the identity middleware, the HTTP routes, the launcher and the command line.

Why it exists: everything that knows the engine or the network lives here; what decides lives in ``parkade_cache``.

What must stay true: importing this package, and asking the command line for help, imports no engine.
"""

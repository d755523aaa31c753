"""The rules of a connection, as states that do no input or output: packets in, what follows from them out.

`worker.WorkerProtocol` is one end, `proxy.ProxyProtocol` the other. Sockets, ZeroMQ and mapped memory are in
`transport`. The traces in `tests/golden/traces` hold both ends, and that of the native proxy, to the same packets.
"""

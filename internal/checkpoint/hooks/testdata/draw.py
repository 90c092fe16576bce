# Answers each connection with what its generators give next, from a forked worker.
import os
import random
import socket
import ssl
import sys
import uuid

import numpy

own = random.Random(7)
rng = numpy.random.default_rng()
state = numpy.random.RandomState(7)
ssl.RAND_bytes(4)

listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while os.fork():  # only in the parent
    os.wait()
while True:
    c, _ = listener.accept()
    drawn = dict(
        random=random.random(), instance=own.random(), gauss=random.gauss(0, 1),
        numpy=numpy.random.random(), default_rng=rng.random(), state=state.normal(),
        openssl=ssl.RAND_bytes(8).hex(), uuid4=uuid.uuid4(),
    )
    c.sendall(" ".join("%s=%s" % i for i in drawn.items()).encode())
    c.close()

"""Makes a restored Python process draw random numbers of its own.

A thread waits at Dewpoint's bell. When the container's generation has changed,
the process is a clone: it reseeds what is listed in reseed(), calls callbacks,
and reports. An application may append functions without arguments to callbacks.

DEWPOINT_RESEED=global leaves generators alone that the application made itself; to
find them every object of the process is looked at.
"""

import os
import sys

callbacks = []

_state = os.environ.get("DEWPOINT_STATE")
_seen = None


def start():
    """Reports this process and begins to wait. Children of fork do the same."""
    if sys.version_info < (3, 7) or not _state or not os.path.exists(_state + "/bell"):
        return
    import atexit

    _begin()
    os.register_at_fork(after_in_child=_begin)
    atexit.register(_leave)


def _begin():
    global _seen
    import _thread

    try:
        _seen = _generation()
        _report(_seen, "ok")
        _thread.start_new_thread(_wait, ())
    except (OSError, RuntimeError) as e:
        sys.stderr.write("dewpoint: no agent in process %d: %r\n" % (os.getpid(), e))


def _wait():
    global _seen
    while True:
        try:
            os.close(os.open(_state + "/bell", os.O_RDONLY | os.O_CLOEXEC))  # until it is rung
            now = _generation()
        except OSError:
            return
        if now != _seen:
            _seen = now
            _report(now, reseed())


def _generation():
    with open(_state + "/generation") as f:
        return f.read(64).strip()


def _name():
    return "%s/agents/python-%d" % (_state, os.getpid())


def _report(generation, result):
    with open(_name() + ".tmp", "w") as f:
        f.write("%s %s\n" % (generation, result[:500]))
    os.rename(_name() + ".tmp", _name())


def _leave():
    try:
        os.unlink(_name())
    except OSError:
        pass


def reseed():
    """Gives the known generators new seeds; returns "ok" or what went wrong."""
    wrong = []
    for step in [_openssl, _random, _numpy, _instances, _uuid] + list(callbacks):
        try:
            step()
        except Exception as e:
            wrong.append("%s: %r" % (getattr(step, "__name__", step), e))
    return "; ".join(wrong).replace("\n", " ") or "ok"


def _openssl():
    ssl = sys.modules.get("_ssl")
    if ssl is not None:
        ssl.RAND_add(os.urandom(48), 48.0)


def _random():
    random = sys.modules.get("random")
    if random is not None:
        random.seed()


def _numpy():
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        _fresh_state(mtrand._rand)


def _fresh_state(state):  # of a numpy.random.RandomState
    state.set_state(type(state)().get_state())


def _instances():
    if os.environ.get("DEWPOINT_RESEED") == "global":
        return
    import gc

    kinds = list(_kinds())
    renews = {}  # by the id of a type; None for the types that are no generators
    for o in gc.get_objects():
        t = type(o)
        if id(t) not in renews:
            renews[id(t)] = next((renew for kind, renew in kinds if issubclass(t, kind)), None)
        if renews[id(t)] is not None:
            renews[id(t)](o)


def _kinds():
    random = sys.modules.get("random")
    if random is not None:
        yield random.SystemRandom, None
        yield random.Random, lambda o: o.seed()
    mtrand = sys.modules.get("numpy.random.mtrand")
    if mtrand is not None:
        yield mtrand.RandomState, _fresh_state
    bits = sys.modules.get("numpy.random.bit_generator")
    if bits is not None:
        yield bits.BitGenerator, _fresh_bits


def _fresh_bits(o):
    o.state = type(o)().state


def _uuid():
    uuid = sys.modules.get("uuid")
    if uuid is not None:  # the address is another one
        uuid._node = uuid._last_timestamp = None

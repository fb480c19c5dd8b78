"""Signals that a process handles for a while."""

import signal

from penstock_enginecore.app import signals_handled


def test_signal_handling_is_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    with signals_handled((signal.SIGUSR1,), lambda: None):
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before

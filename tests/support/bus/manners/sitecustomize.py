"""On the path of a relay: Python imports this first, and its groups get the manners of NCCL."""

from tests.support.bus.nccl_manners import install

install()

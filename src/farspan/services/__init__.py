"""Objects that one process exposes and others call by name: plain values and tensors travel, no code does.

messages     a call or its result as frames
names        which service is where in this run
expose       an object's methods, and the thread that runs them
connection   the calls that are under way to one process
service      what the caller holds
"""

from farspan.services.expose import Exposed as Exposed
from farspan.services.expose import expose as expose
from farspan.services.service import Service as Service
from farspan.services.service import service as service

__all__ = ["Exposed", "Service", "expose", "service"]

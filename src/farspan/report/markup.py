"""Text made safe for SVG and HTML."""

from __future__ import annotations

import re
from xml.sax import saxutils

__all__ = ["escape"]

# What XML 1.0 does not allow even escaped: one such character in a name would break the whole picture.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def escape(text: object) -> str:
    """`text` as the content of an element or of a quoted attribute.

    >>> escape('<b> & "c"')
    '&lt;b&gt; &amp; &quot;c&quot;'
    """
    return saxutils.escape(_FORBIDDEN.sub("?", str(text)), {'"': "&quot;", "'": "&#x27;"})

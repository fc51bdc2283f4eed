"""The words of a command line: how they are read, and the options that several commands share."""

from farspan.cli.arguments.parser import Parser as Parser
from farspan.cli.arguments.parser import host_range as host_range
from farspan.cli.arguments.parser import whole_number as whole_number

__all__ = ["Parser", "host_range", "whole_number"]

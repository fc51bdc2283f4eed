"""Measured (or simulated) steps as numbers, pictures, pages and traces. Imports no torch.

timeline = farspan.report.Timeline.merge(timelines_of_all_ranks)
print(farspan.report.summary(timeline))         # 312 ms | bubble 9.1 % | busy 91 % 90 %
Path("step.html").write_text(farspan.report.html(timeline))
"""

from farspan.report.html import html as html
from farspan.report.measured_step import MeasuredStep as MeasuredStep
from farspan.report.measured_step import Shares as Shares
from farspan.report.measured_step import page_of as page_of
from farspan.report.perfetto import perfetto as perfetto
from farspan.report.predicted_page import predicted_page as predicted_page
from farspan.report.predicted_page import timeline_of as timeline_of
from farspan.report.svg import svg as svg
from farspan.report.text_report import lanes as lanes
from farspan.report.text_report import summary as summary
from farspan.report.timeline import Kind as Kind
from farspan.report.timeline import Span as Span
from farspan.report.timeline import Timeline as Timeline

__all__ = [
    "Kind",
    "MeasuredStep",
    "Shares",
    "Span",
    "Timeline",
    "predicted_page",
    "html",
    "lanes",
    "page_of",
    "perfetto",
    "summary",
    "svg",
    "timeline_of",
]

"""`make report`."""

from benchmarks.report.documents import main

main()

"""`python -m extension_cpp`: the report and the doctor."""

import sys

from extension_cpp.doctor.report import main

if __name__ == "__main__":
    sys.exit(main())

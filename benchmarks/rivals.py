"""placeholder"""
def compare(report, quick): report.note("no rivals yet")

"""What ``snapd forensics`` does: read event logs, report on them, tell stories and compare.

Nothing here runs in the daemon, and no module but ``tables`` imports a database.

Source: design, section 10.
"""

"""What every room may use of the machine and its processes: files, HTTP, tasks, CPU priority, the code's digest."""

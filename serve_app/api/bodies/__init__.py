"""What requests say: their fields, and what each means. No route, no queue, no engine."""

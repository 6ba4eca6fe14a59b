"""`serve-app serve`: reads and checks the config file, starts Ray and the application, and reports
progress."""

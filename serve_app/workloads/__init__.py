"""Load generator for any server with OpenAI's API: arrivals, request mixes, driver and figures."""

"""Load for any server with OpenAI's API: arrival laws, request mixes, the driver that sends them, and its figures."""

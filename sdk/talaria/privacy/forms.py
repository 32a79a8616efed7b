"""What a budget is worth depends on who adds the noise. Imports nothing, as devices without keys read it too."""

FORMS = {
    "coordinator": "central: the coordinator adds the noise to the sum",
    "devices": "shared: each device adds a part of the noise, and the coordinator sees their sum alone",
}
"""By ``noise_by``: who adds noise, and so who is trusted to."""

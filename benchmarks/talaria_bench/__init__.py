"""``talaria bench``: what measures and torments Talaria. No part of its wheel."""

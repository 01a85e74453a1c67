"""Programs that measure dps, each beside what it is fairly compared with. See README.md."""

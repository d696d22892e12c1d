"""Tests of the pages that users read: their code runs, and the site builds."""

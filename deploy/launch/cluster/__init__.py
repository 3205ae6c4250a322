"""A run on several hosts: role hosts, programs that look at hosts, and Ray, which places both.

Commands load ray_site by its name, because Ray is an extra.
Imported by deploy.preflight.
"""

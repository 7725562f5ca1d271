"""What people look at: progress, tables, figures and the privacy statement."""

"""What can be measured, by name, behind one interface."""

"""What a server and its sites agree on and send to each other, whatever carries it.

Belongs here: signed messages, the agreement, enrolment, and the exchange interface. Does not belong
here: files of a server or a site, and Flower.
"""

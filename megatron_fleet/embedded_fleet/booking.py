"""``booking``: meeting rooms."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from megatron_fleet.embedded_fleet.tasktype import DONE, Choices, Goal, Row, Steps, TaskType
from megatron_fleet.embedded_fleet.world import PEOPLE, TEXT, ToolFailure, World, fresh_ids, table, tool
from megatron_fleet.envs.base import ToolCall

CITIES = ("Oslo", "Rome", "Paris", "Lima", "Cairo", "Delhi", "Seoul", "Quito")
KINDS = ("quiet", "garden", "studio", "lab", "hall", "lounge")
SEATS = (4, 6, 8, 12, 20)
SLOTS = ("morning", "noon", "evening")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday")
Fields = dict[str, Any] | None


class Booking(World):
    env_key = "booking"
    schema = """
    CREATE TABLE rooms(id TEXT PRIMARY KEY, city TEXT, kind TEXT, seats INTEGER);
    CREATE TABLE bookings(id TEXT PRIMARY KEY, room TEXT, day TEXT, slot TEXT, guest TEXT);
    """
    columns: ClassVar = {"rooms": "id, city, kind, seats", "bookings": "room, day, slot, guest"}

    def populate(self, rng: random.Random) -> list[str]:
        """Two cities of three rooms over three days; the first resident has one booking on each day."""
        people = rng.sample(PEOPLE, 5)
        days = rng.sample(DAYS, 3)
        rooms = fresh_ids(rng, "R", 6)
        for city, members in zip(rng.sample(CITIES, 2), (rooms[:3], rooms[3:]), strict=True):
            for room, kind in zip(members, rng.sample(KINDS, 3), strict=True):
                self.db.execute("INSERT INTO rooms VALUES (?,?,?,?)", (room, city, kind, rng.choice(SEATS)))
        ids = fresh_ids(rng, "B", 42)
        own_ids, other_ids = iter(ids[:3]), iter(ids[3:])
        for day in days:
            own = rng.choice(rooms)
            for room in rooms:
                taken = rng.sample(SLOTS, 2 if rng.random() < 0.6 else 1)
                guests = [people[0]] if room == own else []
                guests += rng.sample(people[1:], len(taken) - len(guests))
                for slot, guest in zip(taken, guests, strict=True):
                    id = next(own_ids if guest == people[0] else other_ids)
                    self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (id, room, day, slot, guest))
        return people

    @tool("List the rooms of a city.", city=TEXT)
    def find_rooms(self, city: str) -> str:
        return table("kind id seats", self.query("SELECT kind, id, seats FROM rooms WHERE city = ?", city))

    @tool("Show who has a room on a day.", room=TEXT, day=TEXT)
    def room_slots(self, room: str, day: str) -> str:
        self.row("rooms", room, "room")
        guests = dict(self.query("SELECT slot, guest FROM bookings WHERE room = ? AND day = ?", room, day))
        return table("slot guest", [(slot, guests.get(slot, "free")) for slot in SLOTS])

    @tool("Book a room.", room=TEXT, day=TEXT, slot=TEXT)
    def book_room(self, room: str, day: str, slot: str) -> str:
        self.row("rooms", room, "room")
        if day not in DAYS:
            raise ToolFailure(f"no bookings on {day[:10]}")
        if slot not in SLOTS:
            raise ToolFailure(f"no slot {slot[:10]}")
        taken = {row[0] for row in self.query("SELECT id FROM bookings")}
        if self.query("SELECT 1 FROM bookings WHERE room = ? AND day = ? AND slot = ?", room, day, slot):
            raise ToolFailure(f"{room} is taken {day} {slot}")
        id = next(name for n in range(10, 1000) if (name := f"B{n}") not in taken)
        user = self.variables.get("LOGGED_IN_USER", "")
        self.db.execute("INSERT INTO bookings VALUES (?,?,?,?,?)", (id, room, day, slot, user))
        return f"booked {id}"

    @tool("List my bookings.")
    def my_bookings(self) -> str:
        user = self.variables.get("LOGGED_IN_USER", "")
        rows = self.query("SELECT day, id, room, slot FROM bookings WHERE guest = ? LIMIT 6", user)
        return table("day id room slot", rows)

    @tool("Cancel my booking.", id=TEXT)
    def cancel_booking(self, id: str) -> str:
        booking = self.row("bookings", id, "booking")
        if booking["guest"] != self.variables.get("LOGGED_IN_USER"):
            raise ToolFailure(f"{id} belongs to {booking['guest']}")
        self.db.execute("DELETE FROM bookings WHERE id = ?", (id,))
        return f"cancelled {id}"


def _room(world: World, rng: random.Random) -> dict[str, Any]:
    """Pick a random room and day; return its description, id, guests by slot and free slots."""
    id, city, kind, seats = rng.choice(world.query("SELECT id, city, kind, seats FROM rooms"))
    (day,) = rng.choice(world.query("SELECT DISTINCT day FROM bookings"))
    guests = dict(world.query("SELECT slot, guest FROM bookings WHERE room = ? AND day = ?", id, day))
    free = [slot for slot in SLOTS if slot not in guests]
    return {"id": id, "city": city, "kind": kind, "seats": seats, "day": day, "guests": guests, "free": free}


def _told(room: dict[str, Any], *names: str, **more: str) -> dict[str, Any]:
    return {name: room[name] for name in ("city", "kind", *names)} | more


def _find(c: Choices, city: str, kind: str) -> Steps[Row]:
    rows = yield from c.look("find_rooms", city=city)
    return c.row(rows, kind=kind)


def make_seats(world: World, rng: random.Random, goal: Goal) -> Fields:
    room = _room(world, rng)
    goal.answer = str(room["seats"])
    return _told(room)


def solve_seats(c: Choices, city: str, kind: str) -> Steps[str]:
    room = yield from _find(c, city, kind)
    return c.value(room["seats"], [room["id"]])


def make_book(world: World, rng: random.Random, goal: Goal) -> Fields:
    room = _room(world, rng)
    slot = rng.choice(room["free"])
    goal.insert("bookings", room["id"], room["day"], slot, world.variables["LOGGED_IN_USER"])
    return _told(room, "day", slot=slot)


def solve_book(c: Choices, city: str, kind: str, day: str, slot: str) -> Steps[str]:
    rows = yield from c.look("find_rooms", city=city)
    if not c.forgets():
        yield from c.act_on(
            rows, {"kind": kind}, lambda r: ToolCall("book_room", {"room": r["id"], "day": day, "slot": slot})
        )
    return DONE


def make_guest(world: World, rng: random.Random, goal: Goal) -> Fields:
    room = _room(world, rng)
    slot = rng.choice(sorted(room["guests"]))
    goal.answer = room["guests"][slot]
    return _told(room, "day", slot=slot)


def solve_guest(c: Choices, city: str, kind: str, day: str, slot: str) -> Steps[str]:
    room = yield from _find(c, city, kind)
    slots = yield from c.look("room_slots", room=room["id"], day=day)
    return c.row(slots, slot=slot)["guest"]


def make_book_free(world: World, rng: random.Random, goal: Goal) -> Fields:
    room = _room(world, rng)
    if len(room["free"]) != 1:
        return None
    goal.insert("bookings", room["id"], room["day"], room["free"][0], world.variables["LOGGED_IN_USER"])
    goal.answer = room["free"][0]
    return _told(room, "day")


def solve_book_free(c: Choices, city: str, kind: str, day: str) -> Steps[str]:
    room = yield from _find(c, city, kind)
    slots = yield from c.look("room_slots", room=room["id"], day=day)
    booked = yield from c.act_on(
        slots,
        {"guest": "free"},
        lambda r: ToolCall("book_room", {"room": room["id"], "day": day, "slot": r["slot"]}),
    )
    return c.value(booked["slot"], [r["slot"] for r in slots if r is not booked])


def make_fallback(world: World, rng: random.Random, goal: Goal) -> Fields:
    room = _room(world, rng)
    if rng.random() < 0.5:
        first, second = rng.choice(sorted(room["guests"])), rng.choice(room["free"])
        slot = second
    else:
        slot = first = rng.choice(room["free"])
        second = rng.choice([s for s in SLOTS if s != first])
    goal.insert("bookings", room["id"], room["day"], slot, world.variables["LOGGED_IN_USER"])
    return _told(room, "day", slot=first, other=second)


def solve_fallback(c: Choices, city: str, kind: str, day: str, slot: str, other: str) -> Steps[str]:
    room = yield from _find(c, city, kind)
    slots = yield from c.look("room_slots", room=room["id"], day=day)
    free = c.row(slots, slot=slot)["guest"] == "free"
    yield from c.act("book_room", room=room["id"], day=day, slot=slot if c.holds(free) else other)
    return DONE


def _own_booking(world: World, rng: random.Random) -> tuple[str, str, str]:
    """Return id, room and day of a random booking of the user; the day identifies it."""
    user = world.variables["LOGGED_IN_USER"]
    return rng.choice(world.query("SELECT id, room, day FROM bookings WHERE guest = ?", user))


def make_cancel(world: World, rng: random.Random, goal: Goal) -> Fields:
    id, _, day = _own_booking(world, rng)
    goal.delete("bookings", id)
    return {"day": day}


def solve_cancel(c: Choices, day: str) -> Steps[str]:
    rows = yield from c.look("my_bookings")
    booking = c.row(rows, day=day)
    yield from c.act("cancel_booking", id=booking["id"])
    return DONE


def make_move(world: World, rng: random.Random, goal: Goal) -> Fields:
    id, room, day = _own_booking(world, rng)
    taken = {slot for (slot,) in world.query("SELECT slot FROM bookings WHERE room = ? AND day = ?", room, day)}
    slot = rng.choice([s for s in SLOTS if s not in taken])
    goal.delete("bookings", id)
    goal.insert("bookings", room, day, slot, world.variables["LOGGED_IN_USER"])
    return {"day": day, "slot": slot}


def solve_move(c: Choices, day: str, slot: str) -> Steps[str]:
    rows = yield from c.look("my_bookings")
    booking = c.row(rows, day=day)
    yield from c.do("cancel_booking", id=booking["id"])
    yield from c.act("book_room", room=booking["room"], day=booking["day"], slot=slot)
    return DONE


TYPES = (
    TaskType(
        "seats",
        1,
        (
            "How many seats does the {kind} room in {city} have? Answer with the number.",
            "Answer with the number of seats of the {kind} room in {city}.",
        ),
        make_seats,
        solve_seats,
    ),
    TaskType(
        "book",
        1,
        ("Book the {kind} room in {city} for {day} {slot}.", "I need the {kind} room in {city} on {day} {slot}."),
        make_book,
        solve_book,
    ),
    TaskType(
        "cancel",
        1,
        ("Cancel my booking of {day}.", "I can not come on {day}, cancel my booking."),
        make_cancel,
        solve_cancel,
    ),
    TaskType(
        "guest",
        2,
        (
            "Who has the {kind} room in {city} on {day} {slot}? Answer with the name.",
            "Answer with the name of the guest who has the {kind} room in {city} on {day} {slot}.",
        ),
        make_guest,
        solve_guest,
    ),
    TaskType(
        "move",
        2,
        (
            "Move my booking of {day} to the {slot}, same room.",
            "My booking of {day} must be in the {slot}, same room.",
        ),
        make_move,
        solve_move,
    ),
    TaskType(
        "fallback",
        3,
        (
            "Book the {kind} room in {city} for {day} {slot}. If that is taken, book the {other}.",
            "I need the {kind} room in {city} on {day} {slot}, or {other} if that is taken.",
        ),
        make_fallback,
        solve_fallback,
    ),
    TaskType(
        "book_free",
        3,
        (
            "Book the {kind} room in {city} on {day} when it is free. Answer with the slot.",
            "I need the {kind} room in {city} on {day}, whenever it is free. Answer with the slot.",
        ),
        make_book_free,
        solve_book_free,
    ),
)

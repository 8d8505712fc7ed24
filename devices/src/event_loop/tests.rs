use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

use rustix::event::{EventfdFlags, eventfd};

use super::*;

const SOON: Option<Duration> = Some(Duration::ZERO);

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn ring(event: &OwnedFd) {
    rustix::io::write(event, &1_u64.to_ne_bytes()).unwrap();
}

/// What the loop reports, in order: keys as they are, messages in brackets.
fn wait(events: &mut EventLoop<u8, u8>, timeout: Option<Duration>) -> Vec<String> {
    let mut list = vec![Event::Message(99)];
    events.wait(timeout, &mut list).unwrap();
    let text = |event: &Event<u8, u8>| match event {
        Event::Ready(key, _) => key.to_string(),
        Event::Message(message) => format!("({message})"),
    };
    list.iter().map(text).collect()
}

#[test]
fn messages_come_after_descriptors_whichever_was_first() {
    let mut events = EventLoop::new().unwrap();
    let (a, b) = (event(), event());
    events.watch(&a, 1, EventSet::IN).unwrap();
    events.watch(&b, 2, EventSet::IN).unwrap();
    assert_eq!(wait(&mut events, SOON), [""; 0]);
    assert!(events.sender().send(7));
    assert!(events.sender().send(8));
    ring(&b);
    ring(&a);
    assert_eq!(wait(&mut events, None), ["2", "1", "(7)", "(8)"]);
    // A message is reported once, a descriptor as long as it is ready.
    assert_eq!(wait(&mut events, None), ["2", "1"]);
}

#[test]
fn a_message_ends_the_wait_of_another_thread() {
    let mut events = EventLoop::<u8, u8>::new().unwrap();
    let sender = events.sender();
    let waiting = thread::spawn(move || wait(&mut events, None));
    assert!(sender.send(1));
    assert_eq!(waiting.join().unwrap(), ["(1)"]);
}

#[test]
fn messages_to_a_loop_that_is_gone_are_dropped() {
    let events = EventLoop::<u8, Arc<()>>::new().unwrap();
    let (sender, message) = (events.sender(), Arc::new(()));
    assert!(sender.send(Arc::clone(&message)));
    drop(events);
    assert_eq!(Arc::strong_count(&message), 1);
    assert!(!sender.send(Arc::clone(&message)));
    assert_eq!(Arc::strong_count(&message), 1);
}

#[test]
fn an_edge_is_reported_once() {
    let mut events = EventLoop::new().unwrap();
    let bell = event();
    let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
    events.watch(&bell, 1, edges).unwrap();
    ring(&bell);
    assert_eq!(wait(&mut events, None), ["1"]);
    assert_eq!(wait(&mut events, SOON), [""; 0]);
    ring(&bell);
    assert_eq!(wait(&mut events, None), ["1"]);
}

/// A clone of the descriptor keeps it open, and ready.
#[test]
fn an_unwatched_descriptor_is_not_reported_and_its_number_is_free() {
    let mut events = EventLoop::new().unwrap();
    let ours = event();
    let theirs = ours.try_clone().unwrap();
    events.watch(&ours, 1, EventSet::IN).unwrap();
    let twice = events.watch(&ours, 2, EventSet::IN).unwrap_err();
    assert_eq!(twice.kind(), io::ErrorKind::AlreadyExists);
    events.unwatch(&ours).unwrap();
    assert_eq!(
        events.unwatch(&ours).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    drop(ours);
    ring(&theirs);
    assert_eq!(wait(&mut events, SOON), [""; 0]);
    events.watch(&theirs, 3, EventSet::OUT).unwrap();
    assert_eq!(wait(&mut events, None), ["3"]);
    events.rewatch(&theirs, EventSet::empty()).unwrap();
    assert_eq!(wait(&mut events, SOON), [""; 0]);
}

#[test]
fn descriptors_beyond_the_limit_of_one_wait_come_with_the_next() {
    let mut events = EventLoop::new().unwrap();
    let many = [(); MAX_READY + 5].map(|()| event());
    for (key, fd) in many.iter().enumerate() {
        events.watch(fd, key as u8, EventSet::IN).unwrap();
        ring(fd);
    }
    let mut all = wait(&mut events, None);
    assert_eq!(all.len(), MAX_READY);
    all.extend(wait(&mut events, None));
    all.sort();
    all.dedup();
    assert_eq!(all.len(), many.len());
}

#[test]
fn a_wait_below_a_millisecond_ends() {
    let mut events = EventLoop::new().unwrap();
    let brief = Some(Duration::from_nanos(1));
    assert_eq!(wait(&mut events, brief), [""; 0]);
}

#[test]
fn a_file_that_is_always_ready_cannot_be_watched() {
    let mut events = EventLoop::<u8, u8>::new().unwrap();
    let null = File::open("/dev/null").unwrap();
    let refused = events.watch(&null, 1, EventSet::IN).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
}

//! Which thread beside a rank's own may communicate: one at a time, from its first message to its end.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// How long a thread waits for the one before it to end: one that has returned may not have left yet.
const GRACE: Duration = Duration::from_secs(1);

/// The place of one thread.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    holder: Mutex<Option<ThreadId>>,
    left: Condvar,
}

thread_local! {
    static HELD: RefCell<Vec<Held>> = const { RefCell::new(Vec::new()) };
}

/// Leaves a seat when its thread ends.
struct Held(Weak<Seat>);

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(seat) = self.0.upgrade() {
            *seat.holder() = None;
            seat.left.notify_all();
        }
    }
}

impl Seat {
    fn holder(&self) -> MutexGuard<'_, Option<ThreadId>> {
        self.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the seat to the calling thread until it ends; false when another thread has it and lives.
    pub(crate) fn take(self: &Arc<Self>) -> bool {
        let me = thread::current().id();
        let holder = self.holder();
        if *holder == Some(me) {
            return true;
        }
        let waited = self.left.wait_timeout_while(holder, GRACE, |holder| holder.is_some());
        let (mut holder, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if holder.is_some() {
            return false;
        }
        *holder = Some(me);
        HELD.with(|held| held.borrow_mut().push(Held(Arc::downgrade(self))));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn one_thread_at_a_time_has_the_seat() {
        let seat = Arc::<Seat>::default();
        let (end, wait) = mpsc::channel::<()>();
        let (taken, is_taken) = mpsc::channel();
        let first = thread::spawn({
            let seat = seat.clone();
            move || {
                taken.send(seat.take() && seat.take()).unwrap();
                wait.recv().unwrap();
            }
        });
        assert!(is_taken.recv().unwrap());
        assert!(!seat.take(), "the first thread lives");
        end.send(()).unwrap();
        first.join().unwrap();
        assert!(seat.take(), "the first thread has ended");
    }
}

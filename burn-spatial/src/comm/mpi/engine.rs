//! Operations under way: the engine owns them and their buffers until they are done.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mpi_sys as ffi;

use crate::comm::node::NodeMemory;
use crate::comm::{CommCounters, CommError, Kind, Request, lock};

/// How long the thread that drives messages sleeps between two looks: at less than a percent of the rank's time.
const PERIOD: Duration = Duration::from_micros(500);

/// Keeps what MPI may still use alive for ever.
pub(super) fn leak<T>(value: T) {
    let _ = ManuallyDrop::new(value);
}

/// `owner`, if starting its messages went well. Otherwise some may be under way all the same, and it is leaked.
pub(super) fn started<T>(owner: T, result: Result<(), CommError>) -> Result<T, CommError> {
    match result {
        Ok(()) => Ok(owner),
        Err(error) => {
            leak(owner);
            Err(error)
        }
    }
}

/// An MPI communicator.
#[derive(Clone, Copy)]
pub(super) struct Handle(pub(super) ffi::MPI_Comm);

// SAFETY: a handle names an object inside MPI, which may be used from any thread under MPI_THREAD_MULTIPLE; `init`
// refuses a library that does not provide it.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// What all communicators of the process share.
pub(super) struct Engine {
    pub(super) world: Handle,
    pub(super) rank: usize,
    pub(super) local_rank: usize,
    pub(super) node: Option<NodeMemory>,
    /// Bytes of the longest message.
    pub(super) cap: usize,
    pub(super) timeout: Option<Duration>,
    pub(super) active: Mutex<Active>,
    /// Wakes the driver.
    pub(super) submitted: Condvar,
    pub(super) driver: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
pub(super) struct Active {
    pub(super) slots: Vec<SharedSlot>,
    /// No more is to be driven beside the rank's own calls.
    pub(super) ended: bool,
}

impl Engine {
    /// Starts the thread that drives messages while the rank computes. Without it they wait for the rank's calls.
    pub(super) fn start_driver(engine: &Arc<Engine>) {
        let driven = engine.clone();
        match std::thread::Builder::new().name("messages".into()).spawn(move || driven.keep_driving()) {
            Ok(driver) => *lock(&engine.driver) = Some(driver),
            Err(cause) => tracing::warn!("no thread for the progress of messages, which make it in the rank's calls alone: {cause}"),
        }
    }

    pub(super) fn keep_driving(&self) {
        loop {
            let mut active = lock(&self.active);
            while active.slots.is_empty() && !active.ended {
                active = self.submitted.wait(active).unwrap_or_else(PoisonError::into_inner);
            }
            if active.ended {
                return;
            }
            drop(active);
            self.drive();
            std::thread::sleep(PERIOD);
        }
    }

    pub(super) fn end_driver(&self) {
        lock(&self.active).ended = true;
        self.submitted.notify_all();
        if let Some(driver) = lock(&self.driver).take() {
            // A panic of it has been printed, and nothing depends on the thread.
            let _ = driver.join();
        }
    }

    /// Takes over an operation that has been started.
    pub(super) fn submit<T: Operation + 'static>(&self, op: T) -> Arc<Mutex<Slot<T>>> {
        let slot = Arc::new(Mutex::new(Slot { state: Progress::Pending, op }));
        lock(&self.active).slots.push(slot.clone());
        self.submitted.notify_one();
        slot
    }

    /// Lets every operation under way go on, and says whether none is left. A slot in use is being driven already.
    pub(super) fn drive(&self) -> bool {
        let Ok(mut active) = self.active.try_lock() else { return false };
        active.slots.retain(|slot| {
            let Ok(mut held) = slot.try_lock() else { return true };
            held.poll();
            if let Progress::Failed(_) = held.state {
                // Other messages of the operation may still be under way.
                leak(slot.clone());
            }
            matches!(held.state, Progress::Pending)
        });
        active.slots.is_empty()
    }

    /// Waits for an operation. One that fails or is late stays with the engine.
    pub(super) fn wait<T: Operation + ?Sized>(&self, slot: &Mutex<Slot<T>>, name: &'static str) -> Result<(), CommError> {
        let start = Instant::now();
        loop {
            {
                let mut held = lock(slot);
                held.poll();
                match &held.state {
                    Progress::Done => return Ok(()),
                    Progress::Failed(error) => return Err(error.clone()),
                    Progress::Pending => {}
                }
                if let Some(timeout) = self.timeout.filter(|timeout| start.elapsed() >= *timeout) {
                    let missing = held.op.missing();
                    return Err(CommError::Timeout { rank: self.rank, op: name, seconds: timeout.as_secs(), missing });
                }
            }
            self.drive();
            std::thread::yield_now();
        }
    }
}

/// Something under way that MPI messages complete.
pub(super) trait Operation: Send {
    /// Goes as far as possible without waiting; true when done.
    fn poll(&mut self) -> Result<bool, CommError>;
    /// The world ranks whose messages have not come.
    fn missing(&self) -> Vec<usize>;
    /// The bytes a request yields, once done.
    fn take(&mut self) -> Vec<u8>;
    /// Cancels the messages nobody answered.
    fn abandon(&mut self);
}

pub(super) enum Progress {
    Pending,
    Done,
    Failed(CommError),
}

/// Held by the engine and by the request.
pub(super) type SharedSlot = Arc<Mutex<Slot<dyn Operation>>>;

pub(super) struct Slot<T: ?Sized> {
    pub(super) state: Progress,
    pub(super) op: T,
}

impl<T: Operation + ?Sized> Slot<T> {
    pub(super) fn poll(&mut self) {
        if let Progress::Pending = self.state {
            match self.op.poll() {
                Ok(false) => {}
                Ok(true) => self.state = Progress::Done,
                Err(error) => self.state = Progress::Failed(error),
            }
        }
    }
}

/// A handle on an operation that the engine owns.
pub(super) struct Pending {
    pub(super) engine: Arc<Engine>,
    pub(super) slot: SharedSlot,
    pub(super) kind: Kind,
    pub(super) counters: Arc<CommCounters>,
}

impl Request for Pending {
    fn test(&mut self) -> Result<bool, CommError> {
        self.engine.drive();
        let mut slot = lock(&self.slot);
        slot.poll();
        match &slot.state {
            Progress::Done => Ok(true),
            Progress::Pending => Ok(false),
            Progress::Failed(error) => Err(error.clone()),
        }
    }

    fn wait(self: Box<Self>) -> Result<Vec<u8>, CommError> {
        let start = Instant::now();
        let result = self.engine.wait(&self.slot, self.kind.name());
        self.counters.waited(self.kind, start.elapsed());
        result?;
        Ok(lock(&self.slot).op.take())
    }
}

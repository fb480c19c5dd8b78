#include <future>
#include <iostream>
#include <map>
#include <thread>

#include "client.h"
#include "errors.h"

namespace client {

namespace {

using penstock::inference::v1::GenerateSessionRequest;
using penstock::inference::v1::GenerateSessionResponse;
using Stream = grpc::ClientReaderWriter<GenerateSessionRequest, GenerateSessionResponse>;

const std::string kFirstId = "0";  // id of the request that --abort-after aborts

// Sends all requests, and then aborts the first request if `abort` is true. If the stream has failed, Finish returns the error.
void send(const Client& client, Stream& stream, std::future<bool> abort) {
  const auto& prompts = client.options.texts;
  for (size_t number = 0; number < prompts.size(); ++number) {
    GenerateSessionRequest request;
    *request.mutable_generate() = client.generate_request(prompts[number]);
    request.mutable_generate()->set_request_id(std::to_string(number));
    if (!stream.Write(request)) return;
  }
  if (abort.get()) {
    GenerateSessionRequest request;
    request.set_abort_request_id(kFirstId);
    if (!stream.Write(request)) return;
  }
  stream.WritesDone();
}

// The outputs of a session's requests.
class Answers {
 public:
  explicit Answers(std::optional<int64_t> abort_after) : left_(abort_after.value_or(0)) {
    if (!abort_after) decide(false);
  }

  // Becomes true or false when it is known whether to abort the first request.
  std::future<bool> abort() { return abort_.get_future(); }

  bool failed() const { return failed_; }

  // Processes a message. Prints a text that is complete, or the error of a request.
  void take(const GenerateSessionResponse& response) {
    if (response.has_error()) {
      failed_ = true;
      std::cerr << describe(response.error());
      count(response.error().request_id(), true);
      return;
    }
    const auto& output = response.output();
    std::string& text = texts_[output.request_id()];
    text += output.text();
    const bool ended = output.finish_reason() != penstock::common::v1::FINISH_REASON_UNSPECIFIED;
    if (ended) {
      const bool aborted = output.finish_reason() == penstock::common::v1::FINISH_REASON_ABORT;
      std::cout << "[" << output.request_id() << "] " << text << (aborted ? " (aborted)" : "") << std::endl;
    }
    count(output.request_id(), ended);
  }

  // Ends the session: no further messages will arrive.
  void end() {
    if (!decided_) decide(false);
  }

 private:
  void count(const std::string& id, bool ended) {
    if (decided_ || id != kFirstId) return;
    if (ended || --left_ == 0) decide(!ended);
  }

  void decide(bool abort) {
    decided_ = true;
    abort_.set_value(abort);
  }

  std::map<std::string, std::string> texts_;  // text of each request so far, by request id
  bool failed_ = false;
  int64_t left_;  // messages of the first request until it is aborted
  bool decided_ = false;
  std::promise<bool> abort_;
};

}  // namespace

// Continues all prompts over one stream, and prints each text when it is complete.
int session(const Client& client) {
  Call call(client);
  auto stream = client.stub->GenerateSession(call.context());
  Answers answers(client.options.abort_after);
  std::thread sender(send, std::cref(client), std::ref(*stream), answers.abort());
  GenerateSessionResponse response;
  while (stream->Read(&response)) answers.take(response);
  answers.end();
  sender.join();
  const int code = finish(client, stream->Finish());
  return code == 0 && answers.failed() ? kExitFailed : code;
}

}  // namespace client
